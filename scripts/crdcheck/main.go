// Has Kubernetes' own code validate a CustomResourceDefinition: structure, defaults, CEL rules and what they cost.
package main

import (
	"context"
	"fmt"
	"os"

	"k8s.io/apiextensions-apiserver/pkg/apis/apiextensions"
	"k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/install"
	v1 "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	"k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/validation"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/serializer"
)

func main() {
	scheme := runtime.NewScheme()
	install.Install(scheme)
	text, err := os.ReadFile(os.Args[1])
	if err != nil {
		panic(err)
	}
	decoded, _, err := serializer.NewCodecFactory(scheme, serializer.EnableStrict).UniversalDeserializer().Decode(text, nil, nil)
	if err != nil {
		fmt.Println("decode:", err)
		os.Exit(1)
	}
	crd := decoded.(*v1.CustomResourceDefinition)
	scheme.Default(crd)
	var internal apiextensions.CustomResourceDefinition
	if err := v1.Convert_v1_CustomResourceDefinition_To_apiextensions_CustomResourceDefinition(crd, &internal, nil); err != nil {
		panic(err)
	}
	internal.Status.StoredVersions = []string{"v1alpha1"}
	errors := validation.ValidateCustomResourceDefinition(context.Background(), &internal)
	for _, e := range errors {
		fmt.Println(e)
	}
	if len(errors) > 0 {
		os.Exit(1)
	}
	fmt.Println("valid")
}
