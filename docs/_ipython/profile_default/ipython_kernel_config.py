"""How kernels draw the figures of the notebooks."""

c = get_config()  # type: ignore[name-defined]  # noqa: F821  # IPython gives it
c.InlineBackend.figure_formats = {"svg"}
c.InlineBackend.rc = {
    "figure.dpi": 100,
    "svg.hashsalt": "coterie",
    "svg.fonttype": "none",
    "axes.spines.top": False,
}
c.InlineBackend.rc["axes.spines.right"] = False
c.IPKernelApp.log_level = "ERROR"  # it listens at this machine's own address only
