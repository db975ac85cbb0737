"""The Helm chart, rendered by Helm; and its pods, started on this machine as a kubelet would."""
