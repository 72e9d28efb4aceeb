"""Generated from hub.proto by `make proto`; do not edit."""
