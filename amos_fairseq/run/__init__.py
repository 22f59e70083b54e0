"""What a run does beyond fairseq: ``hook.py`` names the moments of a run, ``hooks.py`` lists the hooks and calls them, every
other file is a topic."""
