"""Users in processes of their own, on one machine or a trusted cluster, over torch.distributed."""
