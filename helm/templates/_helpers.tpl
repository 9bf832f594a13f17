{{/* Names and values that several templates use. */}}

{{- define "quota-proxy.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride -}}
{{- else if not (regexMatch "^[a-z][-a-z0-9]*$" .Release.Name) -}}
{{- fail (printf "release %s: no Service may be called so, with a dot or a digit at its start: set fullnameOverride" .Release.Name) -}}
{{- else if contains .Chart.Name .Release.Name -}}
{{- .Release.Name | trunc 50 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name .Chart.Name | trunc 50 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{- define "quota-proxy.selectorLabels" -}}
app.kubernetes.io/name: {{ .Chart.Name }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "quota-proxy.labels" -}}
{{ include "quota-proxy.selectorLabels" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{- end -}}

{{- define "quota-proxy.serviceAccount" -}}
{{- if .Values.serviceAccount.create -}}
{{- .Values.serviceAccount.name | default (include "quota-proxy.fullname" .) -}}
{{- else -}}
{{- .Values.serviceAccount.name | default "default" -}}
{{- end -}}
{{- end -}}

{{/* The Secret with the tokens that the chart makes itself. */}}
{{- define "quota-proxy.ownSecret" -}}
{{- printf "%s-admin" (include "quota-proxy.fullname" .) -}}
{{- end -}}

{{- define "quota-proxy.adminSecret" -}}
{{- .Values.adminToken.existingSecret | default (include "quota-proxy.ownSecret" .) -}}
{{- end -}}

{{/* The keys in that Secret, as {"keys": [...]}. */}}
{{- define "quota-proxy.ownTokenKeys" -}}
{{- $keys := list -}}
{{- if not .Values.adminToken.existingSecret -}}{{- $keys = append $keys .Values.adminToken.key -}}{{- end -}}
{{- range $name, $token := .Values.adminTokens -}}
  {{- if not $token.existingSecret -}}{{- $keys = append $keys (printf "token-%s" $name) -}}{{- end -}}
{{- end -}}
{{- dict "keys" $keys | toJson -}}
{{- end -}}

{{/* Names of the admin Service, and of the pod there, as {"names": [...]}. The pod puts its own name
in: were those of all replicas here, another one would restart them all. */}}
{{- define "quota-proxy.adminNames" -}}
{{- $service := printf "%s-admin" (include "quota-proxy.fullname" .) -}}
{{- $names := list -}}
{{- range $place := list $service (printf "{machine}.%s" $service) -}}
  {{- $namespace := $.Release.Namespace -}}
  {{- range $rest := list "" (printf ".%s" $namespace) (printf ".%s.svc" $namespace) (printf ".%s.svc.cluster.local" $namespace) -}}
    {{- $names = append $names (print $place $rest) -}}
  {{- end -}}
{{- end -}}
{{- dict "names" $names | toJson -}}
{{- end -}}

{{/* The name of a pod of the StatefulSet, whose own name the proxy puts in. */}}
{{- define "quota-proxy.podHost" -}}
{{- printf "{machine}.%s-admin.%s.svc" (include "quota-proxy.fullname" .) .Release.Namespace -}}
{{- end -}}

{{/* The proxy's configuration, with what the chart knows better filled in. */}}
{{- define "quota-proxy.config" -}}
{{- $config := deepCopy .Values.config -}}
{{- range $listener := $config.listeners -}}
  {{- if not $listener.advertised_host -}}
    {{- if ne $.Values.service.type "ClusterIP" -}}
      {{- fail (printf "listener %q needs advertised_host: the name under which clients reach the load balancer" $listener.name) -}}
    {{- end -}}
    {{- $host := printf "%s.%s.svc" (include "quota-proxy.fullname" $) $.Release.Namespace -}}
    {{- if $config.tier -}}{{- $host = include "quota-proxy.podHost" $ -}}{{- end -}}
    {{- $_ := set $listener "advertised_host" $host -}}
  {{- end -}}
{{- end -}}
{{- $state := $config.state | default dict -}}
{{- if and (eq $state.kind "kafka") (gt (int $.Values.replicas) 1) (not $config.tier) -}}
  {{- fail "state.kind kafka is for one replica unless they are a tier: add config.tier" -}}
{{- end -}}
{{- if $config.tier -}}
  {{- if ne $state.kind "kafka" -}}
    {{- fail "config.tier needs config.state.kind kafka, which all replicas can read" -}}
  {{- end -}}
  {{- if $config.tier.machine -}}
    {{- fail (printf "config.tier.machine %s would be the name of every replica, and each needs its own: leave it out, then it is the pod's" $config.tier.machine) -}}
  {{- end -}}
  {{- $tier := merge (deepCopy $config.tier) (dict "admin_host" (include "quota-proxy.podHost" $)) -}}
  {{- $_ := set $config "tier" $tier -}}
{{- end -}}
{{- if eq ($state.kind | default "sqlite") "sqlite" -}}
  {{- $state = merge $state (dict "kind" "sqlite" "path" "/var/lib/quota-proxy/quota-proxy.db") -}}
{{- end -}}
{{- $_ := set $config "state" $state -}}
{{- $admin := merge ($config.admin | default dict) (dict "bind" "0.0.0.0:9644" "token_file" "/etc/quota-proxy/admin/token") -}}
{{- if regexMatch "^(127\\.|localhost:|\\[::1\\])" $admin.bind -}}
  {{- fail (printf "admin.bind %s can't be reached by the kubelet's probes: write 0.0.0.0:9644, or leave it out" $admin.bind) -}}
{{- end -}}
{{- if and $admin.tls $admin.tls.ca_file -}}
  {{- fail "admin.tls.ca_file asks for a certificate, and the kubelet's probes have none: leave it out" -}}
{{- end -}}
{{- if $admin.read_needs_token -}}
  {{- range $path := list "/healthz" "/readyz" -}}
    {{- if not (has $path ($admin.open_paths | default (list "/healthz" "/readyz"))) -}}
      {{- fail (printf "admin.open_paths lacks %s, and the kubelet's probes have no token" $path) -}}
    {{- end -}}
  {{- end -}}
{{- end -}}
{{- $tokens := $admin.tokens | default list -}}
{{- range $name, $token := .Values.adminTokens -}}
  {{- $file := printf "/etc/quota-proxy/admin/tokens/%s" $name -}}
  {{- $made := dict "name" $name "token_file" $file "rights" $token.rights -}}
  {{- if $token.queries -}}{{- $made = set $made "queries" $token.queries -}}{{- end -}}
  {{- $tokens = append $tokens $made -}}
{{- end -}}
{{- $_ := set $admin "tokens" $tokens -}}
{{- $_ := set $admin "hosts" (concat ($admin.hosts | default list) (include "quota-proxy.adminNames" . | fromJson).names) -}}
{{- $_ := set $config "admin" $admin -}}
{{- $config | toYaml -}}
{{- end -}}

{{- define "quota-proxy.adminScheme" -}}
{{- $config := include "quota-proxy.config" . | fromYaml -}}
{{- if $config.admin.tls -}}https{{- else -}}http{{- end -}}
{{- end -}}

{{- define "quota-proxy.adminPort" -}}
{{- $config := include "quota-proxy.config" . | fromYaml -}}
{{- regexFind "[0-9]+$" $config.admin.bind -}}
{{- end -}}

{{- define "quota-proxy.isStateful" -}}
{{- $config := include "quota-proxy.config" . | fromYaml -}}
{{- if or (eq $config.state.kind "sqlite") $config.tier -}}true{{- end -}}
{{- end -}}

{{- define "quota-proxy.hasVolume" -}}
{{- $config := include "quota-proxy.config" . | fromYaml -}}
{{- if eq $config.state.kind "sqlite" -}}true{{- end -}}
{{- end -}}

{{/* Every port that clients use, as {"ports": [{"name": ..., "port": ...}]}. */}}
{{- define "quota-proxy.clientPorts" -}}
{{- $ports := list -}}
{{- range $listener := .Values.config.listeners -}}
  {{- $bootstrap := regexFind "[0-9]+$" $listener.bind | int -}}
  {{- $ports = append $ports (dict "name" $listener.name "port" $bootstrap) -}}
  {{- if $listener.broker_ports -}}
    {{- $ends := splitList "-" $listener.broker_ports -}}
    {{- $first := index $ends 0 | int -}}
    {{- $last := index $ends 1 | int -}}
    {{- if ge (sub $last $first) 1000 -}}
      {{- fail (printf "listener %q: broker_ports %s are more than 1000, and each is a port of the Service: write as many as there are broker ids, or have one for all with tls.sni" $listener.name $listener.broker_ports) -}}
    {{- end -}}
    {{- range $port := untilStep $first (add1 $last | int) 1 -}}
      {{- $ports = append $ports (dict "name" (printf "%s-broker-%d" $listener.name (sub $port $first)) "port" $port) -}}
    {{- end -}}
  {{- end -}}
{{- end -}}
{{- dict "ports" $ports | toJson -}}
{{- end -}}

{{/* Whole seconds from SIGTERM to SIGKILL: preStop, the drain, and five to close and store; in a
tier twenty more to hand the clients over to the others. */}}
{{- define "quota-proxy.graceSeconds" -}}
{{- $limits := .Values.config.limits | default dict -}}
{{- $drain := "10s" -}}
{{- if hasKey $limits "drain_timeout" -}}{{- $drain = toString $limits.drain_timeout -}}{{- end -}}
{{- $factor := get (dict "ms" 0.001 "s" 1.0 "m" 60.0 "h" 3600.0 "" 1.0) (regexFind "[a-z]*$" $drain) -}}
{{- $seconds := mulf (regexFind "^[0-9.]+" $drain | float64) $factor | ceil | int -}}
{{- add .Values.preStopSeconds $seconds 5 (ternary 20 0 (hasKey .Values.config "tier")) -}}
{{- end -}}

{{/* A checksum of what the proxy reads only when it starts. */}}
{{- define "quota-proxy.startChecksum" -}}
{{- omit (include "quota-proxy.config" . | fromYaml) "quotas" "queries" "pipelines" "progress" "throttle" "log_level" | toJson | sha256sum -}}
{{- end -}}
