#include "rows.h"

TELECHAT_SELECT(telechat::RowKernels, row_kernels)
