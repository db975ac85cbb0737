{{/* Instance ids are pod names, and have no dots. */}}
{{- define "pdmesh.fullname" -}}
{{- $name := default .Chart.Name .Values.nameOverride -}}
{{- $full := .Values.fullnameOverride -}}
{{- if not $full -}}
{{- $full = ternary .Release.Name (printf "%s-%s" .Release.Name $name) (contains $name .Release.Name) -}}
{{- end -}}
{{- $full | replace "." "-" | trunc 28 | trimSuffix "-" -}}
{{- end }}

{{- define "pdmesh.secret" -}}
{{- .Values.secrets.existingSecret | default (printf "%s-secrets" (include "pdmesh.fullname" .)) -}}
{{- end }}

{{- define "pdmesh.serviceAccount" -}}
{{- .Values.serviceAccount.name | default (ternary (include "pdmesh.fullname" .) "default" .Values.serviceAccount.create) -}}
{{- end }}

{{- define "pdmesh.image" -}}
{{- $i := .Values.image -}}
{{- if $i.digest }}{{ $i.repository }}@{{ $i.digest }}{{ else }}{{ $i.repository }}:{{ $i.tag }}{{ end -}}
{{- end }}

{{/* What a selector matches: (dict "root" $ "component" "gateway" "pool" "") */}}
{{- define "pdmesh.selector" -}}
app.kubernetes.io/name: {{ default .root.Chart.Name .root.Values.nameOverride }}
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .component }}
{{- with .pool }}
pdmesh/pool: {{ . }}
{{- end }}
{{- end }}

{{- define "pdmesh.labels" -}}
{{ include "pdmesh.selector" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version }}
{{- end }}

{{/* All pods of this release, of any component. */}}
{{- define "pdmesh.release" -}}
app.kubernetes.io/name: {{ default .Chart.Name .Values.nameOverride }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "pdmesh.fromSecret" -}}
valueFrom: { secretKeyRef: { name: {{ include "pdmesh.secret" .root }}, key: {{ .key }} } }
{{- end }}

{{/* Settings as environment variables. JSON spells numbers out; Helm would write 1e+06. */}}
{{- define "pdmesh.settings" -}}
{{- $prefix := .prefix -}}
{{- range $name, $value := .settings }}
- name: {{ $prefix }}{{ $name }}
  value: {{ kindIs "string" $value | ternary $value (toJson $value) | quote }}
{{- end }}
{{- end }}

{{/* Where the nodes are, as the mesh's own settings say it: (dict "root" $ "names" (list "REGION")) */}}
{{- define "pdmesh.place" -}}
{{- $t := .root.Values.topology -}}
{{- if $t.fromPodLabels }}
{{- $labels := dict "REGION" $t.regionLabel "RACK" $t.rackLabel -}}
{{- $given := .settings -}}
{{- range .names }}
{{- if not (or (hasKey $.root.Values.settings .) (hasKey $given .)) }}
- name: PDMESH_{{ . }}
  valueFrom: { fieldRef: { fieldPath: "metadata.labels['{{ get $labels . }}']" } }
{{- end }}
{{- end }}
{{- end }}
{{- end }}

{{/* By what a service knows its callers: API keys, and tokens of an OpenID provider. */}}
{{- define "pdmesh.callersEnv" -}}
{{- $oidc := .root.Values.oidc -}}
{{- if .conf.keysSecret }}
- name: {{ .prefix }}KEYS_FILE
  value: /etc/pdmesh/keys/keys.json
{{- end }}
{{- if $oidc.issuer }}
- name: PDMESH_OIDC_ISSUER
  value: {{ $oidc.issuer | quote }}
- name: PDMESH_OIDC_AUDIENCE
  value: {{ required "oidc.audience: tokens for other services are tokens of the issuer, too" $oidc.audience | quote }}
{{- if $oidc.caSecret }}
- name: PDMESH_OIDC_CA_FILE
  value: /etc/pdmesh/oidc/ca.crt
{{- end }}
{{- else if or $oidc.audience $oidc.caSecret }}
{{- fail "oidc.issuer: audience and caSecret say nothing without it" }}
{{- end }}
{{- end }}
{{- define "pdmesh.callersMounts" -}}
{{- if .conf.keysSecret }}
- { name: keys, mountPath: /etc/pdmesh/keys, readOnly: true }
{{- end }}
{{- if .root.Values.oidc.caSecret }}
- { name: oidc, mountPath: /etc/pdmesh/oidc, readOnly: true }
{{- end }}
{{- end }}
{{- define "pdmesh.callersVolumes" -}}
{{- with .conf.keysSecret }}
- name: keys
  secret: { secretName: {{ . }}, defaultMode: 0440 }
{{- end }}
{{- with .root.Values.oidc.caSecret }}
- name: oidc
  secret: { secretName: {{ . }}, items: [{ key: ca.crt, path: ca.crt }], defaultMode: 0444 }
{{- end }}
{{- end }}

{{- define "pdmesh.spread" -}}
{{- $root := .root -}}
{{- $selector := include "pdmesh.selector" . -}}
{{- range .keys }}
- maxSkew: 1
  topologyKey: {{ . }}
  whenUnsatisfiable: {{ $root.Values.topology.whenUnsatisfiable }}
  labelSelector:
    matchLabels: {{- $selector | nindent 6 }}
{{- end }}
{{- end }}

{{- define "pdmesh.scheduling" -}}
{{- with .nodeSelector }}
nodeSelector: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .tolerations }}
tolerations: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .affinity }}
affinity: {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{/* A volume with the certificate of this pod, made and renewed by cert-manager's csi-driver.
`names`: more DNS names, each after a comma. */}}
{{- define "pdmesh.certificate" -}}
{{- $tls := .root.Values.tls -}}
csi:
  driver: csi.cert-manager.io
  readOnly: true
  volumeAttributes:
    csi.cert-manager.io/issuer-name: {{ required "tls.issuerName: name the issuer of cert-manager" $tls.issuerName | quote }}
    csi.cert-manager.io/issuer-kind: {{ $tls.issuerKind | quote }}
    csi.cert-manager.io/issuer-group: {{ $tls.issuerGroup | quote }}
    csi.cert-manager.io/uri-sans: {{ printf "spiffe://%s/%s/${POD_NAME}" $tls.trustDomain .service | quote }}
    csi.cert-manager.io/dns-names: {{ printf "${POD_NAME}.%s.%s,%s.%s%s" .service $tls.trustDomain .service $tls.trustDomain (.names | default "") | quote }}
    csi.cert-manager.io/key-usages: digital signature,key encipherment,server auth,client auth
    csi.cert-manager.io/duration: {{ $tls.duration | quote }}
    csi.cert-manager.io/fs-group: {{ .root.Values.podSecurityContext.fsGroup | toString | quote }}
{{- end }}
