"""What a run writes down beside its states, in files that people read, too."""
