import tools.math
