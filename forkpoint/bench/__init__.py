"""`forkpoint bench serve`: puts load on a running server and measures it from outside, as a user would see it."""
