"""What a device can do."""

import torch


def cuda_capability(device: torch.device) -> tuple[int, int]:
    """(8, 0): Ampere, (9, 0): Hopper, as which a dry run takes a GPU that this machine has not."""
    return torch.cuda.get_device_capability(device) if torch.cuda.is_available() else (9, 0)
