# The CUDA backend of eadem_kernels: device sources (.cu). The host parts (.cc) are among the layer's sources already.
# Only they and the list of backends see the toolkit, so that all other sources are compiled as without it, once for
# both builds (ccache). Programs that include headers of this folder link CUDA::cudart_static themselves. cuBLASLt is
# opened at run time (linear/cublas_lt.h).
target_link_libraries(eadem_kernels PUBLIC $<LINK_ONLY:CUDA::cudart_static>)
file(GLOB_RECURSE cuda_sources CONFIGURE_DEPENDS ${CMAKE_CURRENT_LIST_DIR}/*.cu)
file(GLOB_RECURSE host_sources CONFIGURE_DEPENDS ${CMAKE_CURRENT_LIST_DIR}/*.cc)
target_sources(eadem_kernels PRIVATE ${cuda_sources})
set_source_files_properties(${CMAKE_CURRENT_LIST_DIR}/../backend.cc PROPERTIES COMPILE_DEFINITIONS EADEM_CUDA
  INCLUDE_DIRECTORIES "${CUDAToolkit_INCLUDE_DIRS}")
set_source_files_properties(${host_sources} PROPERTIES INCLUDE_DIRECTORIES "${CUDAToolkit_INCLUDE_DIRS}")
set_source_files_properties(${CMAKE_CURRENT_LIST_DIR}/linear/cublas_lt.cc PROPERTIES COMPILE_DEFINITIONS
  EADEM_CUDA_LIBRARIES="${CUDAToolkit_LIBRARY_DIR}")
target_compile_options(eadem_kernels PRIVATE
  $<$<COMPILE_LANGUAGE:CUDA>:--Werror=all-warnings -Xptxas=--warn-on-spills -Xcompiler=-Wall,-Wextra,-Werror>)
