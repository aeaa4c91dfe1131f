"""Peers in other organisations, reached by NVFLARE over mutual TLS."""
