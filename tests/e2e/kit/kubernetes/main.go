// Command kubernetes is every Kubernetes program and etcd in one binary: it is linked once, a quarter of the size, and its pages are
// shared by all of them. The name it is called by (a symlink) says which one it is.
package main

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	_ "time/tzdata"

	"github.com/spf13/cobra"
	"go.etcd.io/etcd/server/v3/etcdmain"
	_ "k8s.io/client-go/plugin/pkg/client/auth"
	"k8s.io/component-base/cli"
	_ "k8s.io/component-base/metrics/prometheus/clientgo"
	_ "k8s.io/component-base/metrics/prometheus/version"
	kubectl "k8s.io/kubectl/pkg/cmd"
	"k8s.io/kubectl/pkg/cmd/util"
	apiserver "k8s.io/kubernetes/cmd/kube-apiserver/app"
	manager "k8s.io/kubernetes/cmd/kube-controller-manager/app"
	proxy "k8s.io/kubernetes/cmd/kube-proxy/app"
	scheduler "k8s.io/kubernetes/cmd/kube-scheduler/app"
	kubelet "k8s.io/kubernetes/cmd/kubelet/app"
)

func served(command *cobra.Command) int { return cli.Run(command) }

func main() {
	programs := map[string]func() int{
		"kube-apiserver":          func() int { return served(apiserver.NewAPIServerCommand()) },
		"kube-controller-manager": func() int { return served(manager.NewControllerManagerCommand()) },
		"kube-scheduler":          func() int { return served(scheduler.NewSchedulerCommand()) },
		"kubelet":                 func() int { return served(kubelet.NewKubeletCommand(context.Background())) },
		"kube-proxy":              func() int { return served(proxy.NewProxyCommand()) },
		"kubectl": func() int {
			util.CheckErr(cli.RunNoErrOutput(kubectl.NewDefaultKubectlCommand()))
			return 0
		},
		"etcd": func() int { etcdmain.Main(os.Args); return 0 },
	}
	name := filepath.Base(os.Args[0])
	program, known := programs[name]
	if !known {
		fmt.Fprintf(os.Stderr, "%s is none of the programs in this binary; call it by a symlink with the program's name\n", name)
		os.Exit(2)
	}
	os.Exit(program())
}
