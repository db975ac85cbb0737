{{/*
Who may call gateways and masters: a file of API keys, and tokens of an OpenID provider.
(dict "root" $ "conf" .Values.gateway "prefix" "PDMESH_GATEWAY_")
*/}}
{{- define "pdmesh.callersEnv" -}}
{{- if .conf.keysSecret }}
- name: {{ .prefix }}KEYS_FILE
  value: /etc/pdmesh/keys/keys.json
{{- end }}
{{- with .root.Values.oidc }}
{{- if .issuer }}
- name: PDMESH_OIDC_ISSUER
  value: {{ .issuer | quote }}
- name: PDMESH_OIDC_AUDIENCE
  value: {{ required "oidc.audience: needed with oidc.issuer, else tokens for any other service would be taken" .audience | quote }}
{{- if .caConfigMap }}
- name: PDMESH_OIDC_CA_FILE
  value: /etc/pdmesh/oidc/ca.crt
{{- end }}
{{- $given := dict "JWKS_URL" .jwksUrl "TENANT_CLAIM" .tenantClaim "LIMITS_CLAIM" .limitsClaim "ROLE_CLAIM" .roleClaim }}
{{- $_ := merge $given (dict "ALGORITHMS" .algorithms "DEFAULT_LIMITS" .defaultLimits "ROLES" .roles) }}
{{- range $name, $value := $given }}
{{- if $value }}
- name: PDMESH_OIDC_{{ $name }}
  value: {{ kindIs "string" $value | ternary $value (toJson $value) | quote }}
{{- end }}
{{- end }}
{{- else }}
{{- range $name, $value := . }}
{{- if $value }}
{{- fail (printf "oidc.%s: has no effect without oidc.issuer" $name) }}
{{- end }}
{{- end }}
{{- end }}
{{- end }}
{{- end }}

{{- define "pdmesh.callersMounts" -}}
{{- if .conf.keysSecret }}
- { name: keys, mountPath: /etc/pdmesh/keys, readOnly: true }
{{- end }}
{{- if .root.Values.oidc.caConfigMap }}
- { name: oidc, mountPath: /etc/pdmesh/oidc, readOnly: true }
{{- end }}
{{- end }}

{{- define "pdmesh.callersVolumes" -}}
{{- with .conf.keysSecret }}
- name: keys
  secret: { secretName: {{ . }}, defaultMode: 0440 }
{{- end }}
{{- with .root.Values.oidc.caConfigMap }}
- name: oidc
  configMap: { name: {{ . }} }
{{- end }}
{{- end }}
