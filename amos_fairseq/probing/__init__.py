"""Edge probing (Tenney et al., 2019; AMOS section 5.2): what a small classifier reads off the frozen states of one layer."""
