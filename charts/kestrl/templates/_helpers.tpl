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

{{- /* The name of the operator's Deployment, lease and other objects. */}}
{{- define "kestrl.operator" -}}
{{- printf "%s-operator" (include "kestrl.fullname" .) -}}
{{- end }}

{{- /* The name of the ConfigMap with the operator's configuration. */}}
{{- define "kestrl.configMap" -}}
{{- printf "%s-%s" (include "kestrl.operator" .) (include "kestrl.config" . | sha256sum | trunc 10) -}}
{{- end }}

{{- /* The name of cluster-scoped objects: several installs, each for some namespaces, may exist. */}}
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

{{- /* The key of a release without one: that of an earlier release in this namespace, by which its jobs go on under
their credentials; empty if none is there. Takes a list of Secrets. */}}
{{- define "kestrl.leftKey" -}}
{{- $keys := dict -}}
{{- range . -}}
{{- if and (eq (dig "metadata" "labels" "app.kubernetes.io/name" "" .) "kestrl-operator") (dig "data" "key" "" .) -}}
{{- $_ := set $keys .data.key .metadata.name -}}
{{- end -}}
{{- end -}}
{{- if gt (len $keys) 1 -}}
{{- fail (printf "operator.existingKeySecret: earlier releases in this namespace left different keys, in the Secrets %s; name the one whose jobs are to go on, or delete the others" (values $keys | sortAlpha | join ", ")) -}}
{{- end -}}
{{- with keys $keys }}{{ first . }}{{ end -}}
{{- end }}

{{- /* The selector of the operator's pods. Jobs' NetworkPolicies allow this name, so no value changes it. */}}
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
{{- range $name, $text := .Values.commonLabels }}
{{- if not (has $name (list "app.kubernetes.io/name" "app.kubernetes.io/instance" "app.kubernetes.io/version" "app.kubernetes.io/managed-by" "helm.sh/chart")) }}
{{ $name }}: {{ $text | quote }}
{{- end }}
{{- end }}
{{- end }}

{{- /* An image, from the registry of all images if there is one. Takes a list: the root, and the image. */}}
{{- define "kestrl.image" -}}
{{- $registry := (index . 0).Values.global.registry | trimSuffix "/" -}}
{{- $registry | empty | ternary (index . 1) (regexReplaceAll "^((localhost|[^/]*[.:][^/]*)/)?" (index . 1) (printf "%s/" $registry)) -}}
{{- end }}

{{- /* The settings of jobs, with their images from that registry. */}}
{{- define "kestrl.jobs" -}}
{{- $root := . -}}
{{- $images := dict -}}
{{- range $name, $image := .Values.jobs.images -}}
{{- if kindIs "map" $image -}}
{{- $builds := dict -}}
{{- range $build, $one := $image -}}
{{- $_ := set $builds $build (include "kestrl.image" (list $root $one)) -}}
{{- end -}}
{{- $_ := set $images $name $builds -}}
{{- else if or (not (kindIs "string" $image)) (eq $name "pullPolicy") -}}
{{- $_ := set $images $name $image -}}
{{- else -}}
{{- $_ := set $images $name (include "kestrl.image" (list $root $image)) -}}
{{- end -}}
{{- end -}}
{{- set (deepCopy .Values.jobs) "images" $images | toYaml -}}
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
  "jobs" (include "kestrl.jobs" . | fromYaml)
  "namespaces" .Values.namespaces
  "kueue" .Values.kueue.enabled
  "keyFile" "/etc/kestrl-key/key"
  "lease" $lease
  "healthListen" "0.0.0.0:8080"
  "metricsListen" "0.0.0.0:9464"
  "workFile" "/tmp/at-work"
  "otlp" .Values.operator.otlp
  "auditSeconds" .Values.operator.auditSeconds
  "workers" .Values.operator.workers | toYaml -}}
{{- end }}

{{- /* "true" if a monitoring object is created: it is enabled, or null and the cluster has the API. */}}
{{- define "kestrl.monitored" -}}
{{- if kindIs "invalid" .switch -}}
{{- if .root.Capabilities.APIVersions.Has "monitoring.coreos.com/v1" -}}true{{- end -}}
{{- else if .switch -}}true{{- end -}}
{{- end }}

{{- /* Pod Security "restricted", and a read-only root file system. */}}
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

{{- /* The namespace of the helm test's job, which the operator must watch. */}}
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
