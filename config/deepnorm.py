# post-norm with a scaled stream and its own initial weights (Wang et al. 2022)
norm_position = "deepnorm"
