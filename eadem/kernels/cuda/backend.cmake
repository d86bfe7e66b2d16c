# The CUDA backend of eadem_kernels: device sources (.cu). The host parts (.cc) are among the layer's sources already.
find_package(CUDAToolkit REQUIRED)
target_compile_definitions(eadem_kernels PRIVATE EADEM_CUDA)
target_link_libraries(eadem_kernels PUBLIC CUDA::cudart CUDA::cublasLt)
file(GLOB_RECURSE cuda_sources CONFIGURE_DEPENDS ${CMAKE_CURRENT_LIST_DIR}/*.cu)
target_sources(eadem_kernels PRIVATE ${cuda_sources})
target_compile_options(eadem_kernels PRIVATE
  $<$<COMPILE_LANGUAGE:CUDA>:--Werror=all-warnings -Xptxas=--warn-on-spills -Xcompiler=-Wall,-Wextra,-Werror>)
