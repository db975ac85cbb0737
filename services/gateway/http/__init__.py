"""The gateway's HTTP endpoint: paths, requests, answers, and the OpenAPI document."""
