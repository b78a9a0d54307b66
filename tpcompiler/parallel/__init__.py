"""The programs of all ranks, in memory."""
