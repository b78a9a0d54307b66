"""Check written programs against their claims, without any knowledge of how they were made."""
