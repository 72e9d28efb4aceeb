"""What a pull contains, and where its bytes come from."""
