module kestrl.dev/e2e/kit/keda

go 1.26.8

require github.com/kedacore/keda/v2 v2.21.0
