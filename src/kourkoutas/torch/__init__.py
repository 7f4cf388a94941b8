"""Kourkoutas-β for PyTorch."""

try:
    from kourkoutas.torch.optimizer import KourkoutasBeta
except ModuleNotFoundError as error:
    if error.name != "torch":
        raise
    raise ImportError("kourkoutas.torch needs PyTorch: pip install 'kourkoutas-beta[torch]'") from None

__all__ = ["KourkoutasBeta"]
