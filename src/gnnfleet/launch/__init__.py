"""Processes of a run: started, supervised and restarted, on this machine or several."""
