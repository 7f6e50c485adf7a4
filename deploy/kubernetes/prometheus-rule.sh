#!/bin/sh
# Print the alerts of docker/alerts.yml as a PrometheusRule: deploy/kubernetes/prometheus-rule.sh | kubectl apply -f -
set -eu
cat <<EOF
apiVersion: monitoring.coreos.com/v1
kind: PrometheusRule
metadata:
  name: streamload
spec:
EOF
sed 's/^/  /' "$(dirname "$0")/../../docker/alerts.yml"
