"""Renders the Helm chart, and starts its pods on this machine as a kubelet would."""
