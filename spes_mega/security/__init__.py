"""Keys, tokens, access, and the certificate authority of a run."""
