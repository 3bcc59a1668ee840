"""Documents packed in rows, and the checks that nothing lets one of them read its neighbours."""
