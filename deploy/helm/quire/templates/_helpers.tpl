{{/* Labels of a component: (dict "root" $ "component" "router"). */}}
{{- define "quire.labels" -}}
app.kubernetes.io/name: quire
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .component }}
{{- end }}

{{/* The name of a release's object: (dict "root" $ "component" "router"). */}}
{{- define "quire.name" -}}
{{ .root.Release.Name }}-{{ .component }}
{{- end }}

{{- define "quire.image" -}}
{{ with .root.Values.image.registry }}{{ . }}/{{ end }}quire-{{ .component }}:{{ .root.Values.image.tag | default .root.Chart.AppVersion }}
{{- end }}

{{/* Settings as variables of config map data: (dict "drain-s" 60) is QUIRE_DRAIN_S: "60". */}}
{{- define "quire.variables" -}}
{{- range $flag, $value := . }}
QUIRE_{{ $flag | replace "-" "_" | upper }}: {{ if kindIs "slice" $value }}{{ join "," $value | quote }}{{ else }}{{ $value | toString | quote }}{{ end }}
{{- end }}
{{- end }}

{{/* The variables of all processes. */}}
{{- define "quire.common" -}}
QUIRE_HOST: "0.0.0.0"
QUIRE_MODEL: {{ .Values.model.name | quote }}
{{- with .Values.model.servedName }}
QUIRE_SERVED_MODEL_NAME: {{ . | quote }}
{{- end }}
{{- include "quire.variables" .Values.settings }}
{{- end }}

{{/* The variables of a router. */}}
{{- define "quire.routerVariables" -}}
# Each address of the headless service is a scheduler: the one that serves, or a standby.
QUIRE_SCHEDULER: dns:{{ $.Release.Name }}-scheduler:50052
# Downloaded tokenizers.
QUIRE_CACHE_DIR: /tmp/quire
{{- if .Values.worker.idleUnloadSeconds }}
{{- if or (gt (int .Values.router.replicas) 1) .Values.router.autoscaling.enabled }}
{{- fail "worker.idleUnloadSeconds is set; it needs router.replicas 1, without router.autoscaling" }}
{{- end }}
{{- if or (gt (int .Values.worker.gpus) 1) (gt (int .Values.worker.podsPerGroup) 1) }}
{{- fail "worker.idleUnloadSeconds is set; workers of several devices keep their model" }}
{{- end }}
QUIRE_IDLE_UNLOAD_S: {{ .Values.worker.idleUnloadSeconds | quote }}
{{- end }}
HF_HOME: /tmp/hf
{{- include "quire.variables" .Values.router.settings }}
{{- end }}

{{/* The variables of a scheduler. */}}
{{- define "quire.schedulerVariables" -}}
{{- if gt (int .Values.worker.podsPerGroup) 1 }}
# The leaders of the groups.
{{- $leaders := list }}
{{- range $number := until (int .Values.worker.replicas) }}
{{- $leaders = append $leaders (printf "%s-worker-%d.%s-worker:50053" $.Release.Name $number $.Release.Name) }}
{{- end }}
QUIRE_WORKERS: {{ join "," $leaders | quote }}
{{- else }}
# Each address of the headless service is a worker.
QUIRE_WORKERS: dns:{{ $.Release.Name }}-worker:50053
{{- end }}
# A scheduler that only starts again takes the workers from no other.
QUIRE_STANDBY: "true"
QUIRE_STANDBY_HTTP: "true"
{{- if .Values.scheduler.lease }}
QUIRE_LEASE: {{ $.Release.Name }}-scheduler
{{- end }}
{{- with .Values.scheduler.kvEvents }}
{{- if .enabled }}
QUIRE_KV_EVENTS: "true"
QUIRE_KV_EVENTS_ZMQ: tcp://*:{{ .port }}
QUIRE_KV_EVENTS_REPLAY: tcp://*:{{ .replayPort }}
{{- end }}
{{- end }}
{{- include "quire.variables" .Values.scheduler.settings }}
{{- end }}

{{/* The variables of a worker. */}}
{{- define "quire.workerVariables" -}}
QUIRE_DEVICE: {{ ternary "cuda" "cpu" (gt (int .Values.worker.gpus) 0) }}
HF_HOME: /home/quire/hf
{{- include "quire.variables" .Values.worker.settings }}
{{- end }}

{{/* What every pod has: (dict "root" $ "component" "router" "values" .Values.router). */}}
{{- define "quire.podSpec" -}}
{{- $hasLease := and (eq .component "scheduler") .root.Values.scheduler.lease -}}
serviceAccountName: {{ ternary (include "quire.name" .) .root.Release.Name (not (not $hasLease)) }}
automountServiceAccountToken: {{ not (not $hasLease) }}
# Variables that name services, such as QUIRE_WORKER_PORT, would look like settings.
enableServiceLinks: false
{{- with .root.Values.image.pullSecrets }}
imagePullSecrets: {{- toYaml . | nindent 2 }}
{{- end }}
securityContext:
  runAsNonRoot: true
  runAsUser: 10001
  fsGroup: 10001
  seccompProfile: {type: RuntimeDefault}
{{- with .values.nodeSelector }}
nodeSelector: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .values.affinity }}
affinity: {{- toYaml . | nindent 2 }}
{{- end }}
topologySpreadConstraints:
  - maxSkew: 1
    topologyKey: kubernetes.io/hostname
    whenUnsatisfiable: ScheduleAnyway
    labelSelector:
      matchLabels: {{- include "quire.labels" . | nindent 8 }}
{{- end }}

{{/* What every container has. */}}
{{- define "quire.container" -}}
name: {{ .component }}
image: {{ include "quire.image" . }}
imagePullPolicy: {{ .root.Values.image.pullPolicy }}
envFrom:
  - configMapRef: {name: {{ .root.Release.Name }}}
  - configMapRef: {name: {{ include "quire.name" . }}}
securityContext:
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  capabilities: {drop: [ALL]}
{{- end }}

{{/* Whether a pod is ready for requests, and whether it works at all: another question. */}}
{{- define "quire.probes" -}}
readinessProbe:
  httpGet: {path: /ready, port: http}
  periodSeconds: 2
  failureThreshold: 1
livenessProbe:
  httpGet: {path: /health, port: http}
  periodSeconds: 5
  failureThreshold: 3
{{- end }}

{{/* Restarts the pods when their settings change. */}}
{{- define "quire.podAnnotations" -}}
checksum/settings: {{ print (include "quire.common" .root) (include (printf "quire.%sVariables" .component) .root) | sha256sum }}
{{- with .values.podAnnotations }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{- define "quire.modelMount" -}}
{{- if .Values.model.volume.enabled }}
- {name: model, mountPath: /model, readOnly: true}
{{- end }}
{{- end }}

{{- define "quire.modelVolume" -}}
{{- if .Values.model.volume.enabled }}
- name: model
  persistentVolumeClaim: {claimName: {{ .Values.model.volume.claim | default (printf "%s-model" .Release.Name) }}, readOnly: true}
{{- end }}
{{- end }}

{{- define "quire.token" -}}
{{- with .Values.model.tokenSecret }}
- name: HF_TOKEN
  valueFrom: {secretKeyRef: {name: {{ . }}, key: HF_TOKEN}}
{{- end }}
{{- end }}
