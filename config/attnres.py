# Attention Residuals (Kimi 2026): each sub-layer attends to the outputs of all sub-layers before it
residual_mode = "attnres"
