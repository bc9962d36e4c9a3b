// Reads Kubernetes objects from standard input, as `helm template` prints them, and has Kubernetes' own types decode them: a field
// that there is not, one of another type and one that stands twice are errors.
package main

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"

	monitoring "github.com/prometheus-operator/prometheus-operator/pkg/apis/monitoring/v1"
	extensions "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	"k8s.io/apimachinery/pkg/runtime/serializer"
	"k8s.io/apimachinery/pkg/util/yaml"
	"k8s.io/client-go/kubernetes/scheme"
)

func main() {
	for _, add := range []func() error{
		func() error { return monitoring.AddToScheme(scheme.Scheme) },
		func() error { return extensions.AddToScheme(scheme.Scheme) },
	} {
		if err := add(); err != nil {
			panic(err)
		}
	}
	decoder := serializer.NewCodecFactory(scheme.Scheme, serializer.EnableStrict).UniversalDeserializer()
	documents := yaml.NewYAMLReader(bufio.NewReader(os.Stdin))
	good, bad := 0, 0
	for {
		document, err := documents.Read()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			panic(err)
		}
		if !bytes.Contains(document, []byte("kind:")) {
			continue // comments alone
		}
		if _, kind, err := decoder.Decode(document, nil, nil); err != nil {
			fmt.Println(kind, err)
			bad++
		} else {
			good++
		}
	}
	fmt.Printf("%d objects are as Kubernetes reads them, %d are not\n", good, bad)
	if bad > 0 || good == 0 {
		os.Exit(1)
	}
}
