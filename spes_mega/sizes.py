"""Numbers of bytes as people read them."""


def megabytes(count: int) -> str:
    """Return a number of bytes in MB of a million, with two decimals."""
    return f"{count / 1e6:,.2f} MB"


def gigabytes(count: float) -> str:
    """Return a number of bytes in GB of 10^9, or in TB where that is shorter."""
    return f"{count / 1e9:,.2f} GB" if count < 1e12 else f"{count / 1e12:,.2f} TB"
