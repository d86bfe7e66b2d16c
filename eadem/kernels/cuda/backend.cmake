# The CUDA backend of eadem_kernels: device sources (.cu). The host parts (.cc) are among the layer's sources already.
# Only they and the list of backends see the toolkit, so that all other sources are compiled as without it, once for
# both builds (ccache). Programs that include headers of this folder link CUDA::cudart_static themselves. cuBLASLt is
# opened at run time (linear/cublas_lt.h).
target_link_libraries(eadem_kernels PUBLIC $<LINK_ONLY:CUDA::cudart_static>)
set(cuda ${CMAKE_CURRENT_LIST_DIR})
file(GLOB_RECURSE cuda_sources CONFIGURE_DEPENDS ${cuda}/*.cu)
file(GLOB_RECURSE host_sources CONFIGURE_DEPENDS ${cuda}/*.cc)

# The two groups of kernels. Those of Hopper (wgmma, tensor maps and bulk copies, barriers in shared memory, or written
# for the bits of those that have them) are compiled for 9.0a alone. All others are generic, compiled for each
# architecture of CMAKE_CUDA_ARCHITECTURES. capability.h says which run where.
set(hopper_sources
  attention/attention_backward_wgmma.cu
  attention/attention_decode.cu
  attention/attention_decode_many.cu
  attention/attention_prompt.cu
  decoder/llama_1b.cu
  decoder/llama_8b.cu
  decoder/shapes.cu
  linear/fp8_stream.cu
  linear/fp8_tensor.cu
  linear/fp8_tiles.cu
  linear/integer_group_tiles.cu
  linear/integer_turns.cu
  linear/integer_stream.cu
  linear/integer_tiles.cu
  linear/linear_stream.cu
  linear/packed_direct.cu
  linear/packed_stream.cu
  training/cross_entropy_codes.cu)
list(TRANSFORM hopper_sources PREPEND ${cuda}/)
list(REMOVE_ITEM cuda_sources ${hopper_sources})
target_sources(eadem_kernels PRIVATE ${cuda_sources})

set(cuda_options --Werror=all-warnings -Xptxas=--warn-on-spills -Xcompiler=-Wall,-Wextra,-Werror)
target_compile_options(eadem_kernels PRIVATE $<$<COMPILE_LANGUAGE:CUDA>:${cuda_options}>)
set(hopper_architectures ${CMAKE_CUDA_ARCHITECTURES})
list(FILTER hopper_architectures INCLUDE REGEX "^90a")
if(hopper_architectures)
  add_library(eadem_hopper_kernels OBJECT ${hopper_sources})
  set_target_properties(eadem_hopper_kernels PROPERTIES CUDA_ARCHITECTURES "${hopper_architectures}")
  target_link_libraries(eadem_hopper_kernels PRIVATE eadem_options)
  target_compile_options(eadem_hopper_kernels PRIVATE ${cuda_options})
  target_sources(eadem_kernels PRIVATE $<TARGET_OBJECTS:eadem_hopper_kernels>)
  set_source_files_properties(${cuda}/hopper_left_out.cc PROPERTIES HEADER_FILE_ONLY ON)
endif()

set_source_files_properties(${cuda}/../backend.cc PROPERTIES COMPILE_DEFINITIONS EADEM_CUDA
  INCLUDE_DIRECTORIES "${CUDAToolkit_INCLUDE_DIRS}")
set_source_files_properties(${host_sources} PROPERTIES INCLUDE_DIRECTORIES "${CUDAToolkit_INCLUDE_DIRS}")
set_source_files_properties(${cuda}/linear/cublas_lt.cc PROPERTIES COMPILE_DEFINITIONS
  EADEM_CUDA_LIBRARIES="${CUDAToolkit_LIBRARY_DIR}")
