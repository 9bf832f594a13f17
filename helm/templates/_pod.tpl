{{/* The pod, the same in a StatefulSet and in a Deployment. */}}
{{- define "quota-proxy.pod" -}}
{{- range $label, $_ := include "quota-proxy.labels" . | fromYaml -}}
  {{- if hasKey $.Values.podLabels $label -}}
    {{- fail (printf "podLabels: %s is the chart's own, by which pods are found: leave it out" $label) -}}
  {{- end -}}
{{- end }}
metadata:
  labels:
    {{- include "quota-proxy.labels" . | nindent 4 }}
    {{- with .Values.podLabels }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  annotations:
    # Quotas are left out: the proxy takes their change while it runs.
    checksum/start-config: {{ include "quota-proxy.startChecksum" . }}
    {{- with .Values.podAnnotations }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
spec:
  serviceAccountName: {{ include "quota-proxy.serviceAccount" . }}
  automountServiceAccountToken: false
  enableServiceLinks: false
  terminationGracePeriodSeconds: {{ include "quota-proxy.graceSeconds" . }}
  securityContext:
    runAsNonRoot: true
    runAsUser: 65532
    runAsGroup: 65532
    fsGroup: 65532
    fsGroupChangePolicy: OnRootMismatch
    seccompProfile: {type: RuntimeDefault}
  {{- with .Values.imagePullSecrets }}
  imagePullSecrets: {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with .Values.priorityClassName }}
  priorityClassName: {{ . }}
  {{- end }}
  {{- with .Values.nodeSelector }}
  nodeSelector: {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with .Values.tolerations }}
  tolerations: {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with .Values.affinity }}
  affinity: {{- toYaml . | nindent 4 }}
  {{- end }}
  topologySpreadConstraints:
    {{- if .Values.topologySpreadConstraints }}
    {{- toYaml .Values.topologySpreadConstraints | nindent 4 }}
    {{- else }}
    - maxSkew: 1
      topologyKey: kubernetes.io/hostname
      whenUnsatisfiable: ScheduleAnyway
      labelSelector:
        matchLabels: {{- include "quota-proxy.selectorLabels" . | nindent 10 }}
    {{- end }}
  containers:
    - name: proxy
      {{- with .Values.image }}
      image: {{ if .digest }}{{ printf "%s@%s" .repository .digest | quote }}{{ else }}{{ printf "%s:%s" .repository (.tag | default $.Chart.AppVersion) | quote }}{{ end }}
      {{- end }}
      imagePullPolicy: {{ .Values.image.pullPolicy }}
      args: [run, -c, /etc/quota-proxy/config/quota-proxy.yaml, --log-format, {{ .Values.logFormat }}]
      {{- with .Values.extraEnv }}
      env: {{- toYaml . | nindent 8 }}
      {{- end }}
      ports:
        - {name: admin, containerPort: {{ include "quota-proxy.adminPort" . }}}
        {{- range (include "quota-proxy.clientPorts" . | fromJson).ports }}
        - {containerPort: {{ .port }}}
        {{- end }}
      startupProbe:
        httpGet: {path: /healthz, port: admin, scheme: {{ include "quota-proxy.adminScheme" . | upper }}}
        periodSeconds: 1
        failureThreshold: 60
      livenessProbe:
        httpGet: {path: /healthz, port: admin, scheme: {{ include "quota-proxy.adminScheme" . | upper }}}
        periodSeconds: 10
        timeoutSeconds: 5
        failureThreshold: 3
      readinessProbe:
        httpGet: {path: /readyz, port: admin, scheme: {{ include "quota-proxy.adminScheme" . | upper }}}
        periodSeconds: 5
        timeoutSeconds: 5
        failureThreshold: 2
      lifecycle:
        preStop:
          exec: {command: [sleep, {{ .Values.preStopSeconds | quote }}]}
      resources: {{- toYaml .Values.resources | nindent 8 }}
      securityContext:
        allowPrivilegeEscalation: false
        readOnlyRootFilesystem: true
        capabilities: {drop: [ALL]}
      volumeMounts:
        # Whole directories: the kubelet does not update a file that is mounted by subPath.
        - {name: config, mountPath: /etc/quota-proxy/config, readOnly: true}
        - {name: admin-token, mountPath: /etc/quota-proxy/admin, readOnly: true}
        - {name: state, mountPath: /var/lib/quota-proxy}
        {{- range $name, $mount := .Values.secretMounts }}
        - {name: secret-{{ $name }}, mountPath: /etc/quota-proxy/secrets/{{ $name }}, readOnly: true}
        {{- end }}
        {{- with .Values.extraVolumeMounts }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
  volumes:
    - name: config
      configMap: {name: {{ include "quota-proxy.fullname" . }}}
    - name: admin-token
      projected:
        defaultMode: 0440
        sources:
          - secret:
              name: {{ include "quota-proxy.adminSecret" . }}
              items: [{key: {{ .Values.adminToken.key }}, path: token}]
          {{- range $name, $token := .Values.adminTokens }}
          - secret:
              name: {{ $token.existingSecret | default (include "quota-proxy.ownSecret" $) }}
              items: [{key: {{ if $token.existingSecret }}{{ $token.key | default "token" }}{{ else }}token-{{ $name }}{{ end }}, path: tokens/{{ $name }}}]
          {{- end }}
    {{- if not (include "quota-proxy.hasVolume" .) }}
    - name: state
      emptyDir: {}
    {{- end }}
    {{- range $name, $mount := .Values.secretMounts }}
    - name: secret-{{ $name }}
      secret: {secretName: {{ $mount.secretName }}, defaultMode: 0440}
    {{- end }}
    {{- with .Values.extraVolumes }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
{{- end -}}
