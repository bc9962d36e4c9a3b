// Reads a JSON list of Kubernetes objects from standard input, and prints what kstatus makes of each: the verdict by which Flux,
// Helm 4 and kpt decide whether an object is ready, in a line of its own.
package main

import (
	"encoding/json"
	"fmt"
	"os"

	"github.com/fluxcd/cli-utils/pkg/kstatus/status"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
)

func main() {
	var items []json.RawMessage
	if err := json.NewDecoder(os.Stdin).Decode(&items); err != nil {
		panic(err)
	}
	for _, item := range items {
		object := &unstructured.Unstructured{}
		if err := object.UnmarshalJSON(item); err != nil {
			panic(err)
		}
		result, err := status.Compute(object)
		if err != nil {
			panic(err)
		}
		fmt.Println(result.Status)
	}
}
