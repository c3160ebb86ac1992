"""Talks to a server that speaks OpenAI's HTTP API, forkpoint's own or another."""
