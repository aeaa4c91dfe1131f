"""Control variates: SCAFFOLD and Mime against the drift of local steps, SVRG, SAGA and MVR against noise."""
