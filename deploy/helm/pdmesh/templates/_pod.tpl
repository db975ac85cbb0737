{{/*
The pod of one of the mesh's own services, as `metadata` and `spec`:
  root       the chart's context
  component  gateway, master-scheduler, ...; an instance's is `instance`
  pool, role of an instance
  service    as certificates name it, if that is not the component: an instance's
  prefix     of the service's settings: PDMESH_GATEWAY_
  command    a list
  conf       its part of the values: settings, resources, nodeSelector, ...
  env        more variables, as YAML
  ports      name -> number
  startPath  what the startup probe asks for: the pod has startupSeconds for it
  preStop    seconds before SIGTERM
  drain      seconds that the service may take to drain after SIGTERM
  end        seconds that it may then take to end
  spread     labels of nodes
  mounts, volumes  as YAML
*/}}
{{- define "pdmesh.pod" -}}
{{- $root := .root -}}
{{- $v := $root.Values -}}
{{- $ops := 9100 -}}
metadata:
  labels: # not the chart's version: a new one alone restarts nothing
    {{- include "pdmesh.selector" . | nindent 4 }}
    {{- with .role }}
    pdmesh/role: {{ . }}
    {{- end }}
    {{- with $v.podLabels }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  annotations:
    kubectl.kubernetes.io/default-container: {{ .component }}
    {{- with $v.podAnnotations }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
spec:
  serviceAccountName: {{ include "pdmesh.serviceAccount" $root }}
  automountServiceAccountToken: false
  # Kubernetes would set PDMESH_GATEWAY_PORT and the like, which look like settings.
  enableServiceLinks: false
  # The pause container is the init process: it reaps orphans, and signals act as everywhere.
  shareProcessNamespace: true
  {{- with $v.image.pullSecrets }}
  imagePullSecrets: {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with $v.priorityClassName }}
  priorityClassName: {{ . }}
  {{- end }}
  {{- with .conf.runtimeClassName }}
  runtimeClassName: {{ . }}
  {{- end }}
  securityContext: {{- toYaml $v.podSecurityContext | nindent 4 }}
  # What the service takes at most to drain and to end after SIGTERM.
  terminationGracePeriodSeconds: {{ add (.preStop | default 0) (ceil (.drain | default 5)) (.end | default 5) }}
  {{- with include "pdmesh.scheduling" .conf }}
  {{- . | nindent 2 }}
  {{- end }}
  {{- with .spread }}
  topologySpreadConstraints:
    {{- include "pdmesh.spread" (dict "root" $root "component" $.component "pool" $.pool "keys" .) | nindent 4 }}
  {{- end }}
  containers:
    - name: {{ .component }}
      image: {{ include "pdmesh.image" $root }}
      imagePullPolicy: {{ $v.image.pullPolicy }}
      command: {{ toJson .command }}
      securityContext: {{- toYaml $v.containerSecurityContext | nindent 8 }}
      env:
        - name: {{ .prefix }}INSTANCE_ID
          valueFrom: { fieldRef: { fieldPath: metadata.name } }
        - name: PDMESH_NODE_ID
          valueFrom: { fieldRef: { fieldPath: spec.nodeName } }
        - name: PDMESH_ADVERTISE_HOST
          valueFrom: { fieldRef: { fieldPath: status.podIP } }
        - name: PDMESH_INNER_HOST
          value: {{ $v.listenAddress | quote }}
        - name: {{ .prefix }}OPS_PORT
          value: {{ $ops | quote }}
        - name: PDMESH_STATE_DIR
          value: /tmp/pdmesh
        - name: PDMESH_LOG_FORMAT
          value: json
        - name: HOME
          value: /tmp
        {{- if and $v.tls.enabled $v.nats.enabled }}
        - name: PDMESH_NATS_ROLES
          value: "true"
        {{- end }}
        - name: PDMESH_NATS_URL
          {{- include "pdmesh.fromSecret" (dict "root" $root "key" "nats-url") | nindent 10 }}
        - name: PDMESH_MESH_TOKEN
          {{- include "pdmesh.fromSecret" (dict "root" $root "key" "mesh-token") | nindent 10 }}
        {{- if $v.tls.enabled }}
        - name: {{ .prefix }}TLS_DIR
          value: /etc/pdmesh/tls
        {{- end }}
        {{- with .env }}
        {{- . | nindent 8 }}
        {{- end }}
        {{- include "pdmesh.settings" (dict "prefix" "PDMESH_" "settings" $v.settings) | nindent 8 }}
        {{- include "pdmesh.settings" (dict "prefix" .prefix "settings" .conf.settings) | nindent 8 }}
        {{- with concat $v.extraEnv (.conf.extraEnv | default list) }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
      ports:
        {{- range $name, $port := .ports }}
        - { name: {{ $name }}, containerPort: {{ $port }} }
        {{- end }}
        - { name: ops, containerPort: {{ $ops }} }
      # Ready once it has what it needs to start; until then the other probes wait.
      startupProbe:
        httpGet: { path: {{ .startPath | default "/health/live" }}, port: ops }
        periodSeconds: 2
        timeoutSeconds: 3
        failureThreshold: {{ div (add .conf.startupSeconds 1) 2 }}
      readinessProbe:
        httpGet: { path: /health/ready, port: ops }
        periodSeconds: 5
        timeoutSeconds: 3
        failureThreshold: 3
      # The event loop answers. An instance watches its engine itself.
      livenessProbe:
        httpGet: { path: /health/live, port: ops }
        periodSeconds: 10
        timeoutSeconds: 5
        failureThreshold: 6
      {{- with .preStop }}
      lifecycle:
        preStop: { exec: { command: ["sleep", {{ . | toString | quote }}] } }
      {{- end }}
      resources: {{- toYaml .conf.resources | nindent 8 }}
      volumeMounts:
        - { name: tmp, mountPath: /tmp }
        {{- if $v.tls.enabled }}
        - { name: tls, mountPath: /etc/pdmesh/tls, readOnly: true }
        {{- end }}
        {{- with .mounts }}
        {{- . | nindent 8 }}
        {{- end }}
        {{- with $v.extraVolumeMounts }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
  volumes:
    - name: tmp
      emptyDir: { sizeLimit: {{ .conf.tmpSize | default "256Mi" }} }
    {{- if $v.tls.enabled }}
    - name: tls
      {{- include "pdmesh.certificate" (dict "root" $root "service" (.service | default .component)) | nindent 6 }}
    {{- end }}
    {{- with .volumes }}
    {{- . | nindent 4 }}
    {{- end }}
    {{- with $v.extraVolumes }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
{{- end }}
