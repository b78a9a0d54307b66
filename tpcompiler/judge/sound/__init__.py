"""Whether written programs are what they claim to be: nothing here knows how they were made."""
