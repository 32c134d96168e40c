"""From counts of corrupted sessions to PASS, FAIL or INCONCLUSIVE."""
