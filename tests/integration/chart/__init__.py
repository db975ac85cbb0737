"""The Helm chart deploy/helm/pdmesh."""
