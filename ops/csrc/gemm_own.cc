#include "gemm_own.h"

TELECHAT_SELECT(telechat::OwnGemm, own_gemm)
