#include "cast.h"

TELECHAT_SELECT(telechat::CastKernels, casts)
