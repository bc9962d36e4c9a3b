{{- /* The release's name for objects. */}}
{{- define "kestrl.fullname" -}}
{{- $name := default .Chart.Name .Values.nameOverride -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 50 | trimSuffix "-" -}}
{{- else if contains $name .Release.Name -}}
{{- .Release.Name | trunc 50 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name $name | trunc 50 | trimSuffix "-" -}}
{{- end -}}
{{- end }}

{{- /* The operator's name: of its Deployment, its lease and all that goes with them. */}}
{{- define "kestrl.operator" -}}
{{- printf "%s-operator" (include "kestrl.fullname" .) -}}
{{- end }}

{{- /* The operator's name for objects that no namespace holds: installs for namespaces of their own may stand side by side. */}}
{{- define "kestrl.clusterwide" -}}
{{- if .Values.namespaces -}}
{{- printf "%s-%s" .Release.Namespace (include "kestrl.operator" .) -}}
{{- else -}}
{{- include "kestrl.operator" . -}}
{{- end -}}
{{- end }}

{{- define "kestrl.serviceAccount" -}}
{{- if .Values.serviceAccount.name -}}
{{- .Values.serviceAccount.name -}}
{{- else if .Values.serviceAccount.create -}}
{{- include "kestrl.operator" . -}}
{{- else -}}
{{- fail "serviceAccount.name: name the ServiceAccount to use, since serviceAccount.create is false" -}}
{{- end -}}
{{- end }}

{{- define "kestrl.keySecret" -}}
{{- .Values.operator.existingKeySecret | default (printf "%s-key" (include "kestrl.operator" .)) -}}
{{- end }}

{{- /* What tells the operator's pods from all others. Jobs' NetworkPolicies let this name in, so no value changes it. */}}
{{- define "kestrl.selector" -}}
app.kubernetes.io/name: kestrl-operator
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- /* Labels of every object of the release. */}}
{{- define "kestrl.common" -}}
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{- end }}

{{- /* Labels of the operator's own objects. */}}
{{- define "kestrl.labels" -}}
app.kubernetes.io/name: kestrl-operator
{{ include "kestrl.common" . }}
{{- end }}

{{- /* The operator's settings. */}}
{{- define "kestrl.config" -}}
{{- $lease := dict "name" (include "kestrl.operator" .) "namespace" .Release.Namespace "seconds" .Values.operator.leaseSeconds -}}
{{- dict
  "jobs" .Values.jobs
  "namespaces" .Values.namespaces
  "keyFile" "/etc/kestrl-key/key"
  "lease" $lease
  "healthListen" "0.0.0.0:8080"
  "metricsListen" "0.0.0.0:9464"
  "workFile" "/tmp/at-work"
  "otlp" .Values.operator.otlp
  "auditSeconds" .Values.operator.auditSeconds
  "workers" .Values.operator.workers | toYaml -}}
{{- end }}

{{- /* "true" when a monitoring object is to be made: its switch says so, or says nothing and the cluster knows the API. */}}
{{- define "kestrl.monitored" -}}
{{- if kindIs "invalid" .switch -}}
{{- if .root.Capabilities.APIVersions.Has "monitoring.coreos.com/v1" -}}true{{- end -}}
{{- else if .switch -}}true{{- end -}}
{{- end }}

{{- /* Pod Security "restricted", and a root that cannot be written. */}}
{{- define "kestrl.podSecurity" -}}
runAsNonRoot: true
runAsUser: 10001
runAsGroup: 10001
fsGroup: 10001
seccompProfile:
  type: RuntimeDefault
{{- end }}

{{- define "kestrl.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
{{- end }}

{{- define "kestrl.pullSecrets" -}}
{{- range .Values.operator.pullSecrets }}
- name: {{ . }}
{{- end }}
{{- end }}

{{- /* Where the helm test's job runs: a namespace that the operator looks at. */}}
{{- define "kestrl.testNamespace" -}}
{{- if .Values.namespaces -}}
{{- has .Release.Namespace .Values.namespaces | ternary .Release.Namespace (first .Values.namespaces) -}}
{{- else -}}
{{- .Release.Namespace -}}
{{- end -}}
{{- end }}

{{- define "kestrl.testLabels" -}}
app.kubernetes.io/name: kestrl-test
{{ include "kestrl.common" . }}
{{- end }}

{{- /* Annotations of what the helm test needs: made before its pod, and gone with it. */}}
{{- define "kestrl.testHook" -}}
helm.sh/hook: test
helm.sh/hook-weight: "-1"
helm.sh/hook-delete-policy: before-hook-creation,hook-succeeded
{{- end }}
