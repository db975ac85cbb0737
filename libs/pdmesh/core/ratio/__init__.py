"""How many prefills and decodes a scenario needs: measured, modelled, planned, judged, undone."""
