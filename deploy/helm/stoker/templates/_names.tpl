{{- define "stoker.name" -}}
{{- if contains "stoker" .Release.Name }}{{ .Release.Name | trunc 63 | trimSuffix "-" }}
{{- else }}{{ printf "%s-stoker" .Release.Name | trunc 63 | trimSuffix "-" }}{{ end }}
{{- end }}

{{- define "stoker.selector" -}}
app.kubernetes.io/name: stoker
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "stoker.labels" -}}
{{ include "stoker.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{- end }}

{{- define "stoker.ranks" -}}
{{- mul .Values.tensorParallelSize .Values.pipelineParallelSize .Values.numGroups }}
{{- end }}

{{- /* What can be said to be wrong before a Pod finds out. */ -}}
{{- define "stoker.check" -}}
{{- $ranks := include "stoker.ranks" . | int }}
{{- $gpus := int .Values.gpus }}
{{- if and $gpus (ne $gpus $ranks) }}
{{- fail (printf "gpus is %d, but tensorParallelSize * pipelineParallelSize * numGroups is %d: each rank takes one GPU. Make them equal, or set gpus to 0 to compute on CPUs." $gpus $ranks) }}
{{- end }}
{{- if and (not $gpus) (gt $ranks (int .Values.cpus)) }}
{{- fail (printf "cpus is %d, but tensorParallelSize * pipelineParallelSize * numGroups is %d: each rank wants a CPU of its own. Raise cpus, or take fewer ranks." (int .Values.cpus) $ranks) }}
{{- end }}
{{- end }}
