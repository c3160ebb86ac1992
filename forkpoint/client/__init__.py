"""Clients for servers with OpenAI's HTTP API, forkpoint's own or others."""
