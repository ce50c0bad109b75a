"""The HTTP server: OpenAI's routes on one engine that many tenants share."""
