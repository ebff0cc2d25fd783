"""One model over several devices, a process each: the first rank decides, the others follow (tensor parallelism)."""
