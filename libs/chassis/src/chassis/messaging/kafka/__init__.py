"""The modules that import the client library; no other one does."""
