"""What may be wrong with hosts, links and placement, and who is to blame."""
