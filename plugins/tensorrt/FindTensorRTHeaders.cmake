# The headers of TensorRT 10 or newer; no library of it is needed. The first of these that has NvInferRuntime.h:
#
#   TENSORRT_INCLUDE_DIR and TENSORRT_ROOT, each a variable of CMake or of the environment; the system's folders; and the
#   Python package kernel-lens, which carries them
#
# Sets TensorRTHeaders_FOUND, and the target TensorRT::Headers; or TensorRTHeaders_PROBLEM, a sentence. TensorRTHeaders_NAMED
# says whether one of the variables is set: then nothing else is looked at, and a problem is that of the named folder.
set(TENSORRT_ROOT "" CACHE PATH "A folder with TensorRT's include/NvInferRuntime.h")
set(TENSORRT_INCLUDE_DIR "" CACHE PATH "The folder of TensorRT's NvInferRuntime.h")
set(TensorRTHeaders_FOUND FALSE)
set(TensorRTHeaders_PROBLEM "")
set(TensorRTHeaders_NAMED FALSE)
foreach(folder IN ITEMS "${TENSORRT_INCLUDE_DIR}" "$ENV{TENSORRT_INCLUDE_DIR}" "${TENSORRT_ROOT}" "$ENV{TENSORRT_ROOT}")
  if(folder)
    set(TensorRTHeaders_NAMED TRUE)
  endif()
endforeach()
# A path from the command line is relative to where that was typed; a type says that it is one.
if(DEFINED Python_EXECUTABLE)
  set(Python_EXECUTABLE "${Python_EXECUTABLE}" CACHE FILEPATH "The Python in which kernel-lens is looked up")
endif()

# What is named and has no headers is an error, not a reason to look elsewhere.
function(_tensorrt_find result)
  foreach(folder IN ITEMS "${TENSORRT_INCLUDE_DIR}" "$ENV{TENSORRT_INCLUDE_DIR}")
    if(folder)
      if(EXISTS "${folder}/NvInferRuntime.h")
        set(${result} "${folder}" PARENT_SCOPE)
      else()
        set(TensorRTHeaders_PROBLEM "TENSORRT_INCLUDE_DIR is ${folder}, which has no NvInferRuntime.h" PARENT_SCOPE)
      endif()
      return()
    endif()
  endforeach()
  foreach(root IN ITEMS "${TENSORRT_ROOT}" "$ENV{TENSORRT_ROOT}")
    if(root)
      find_path(found NvInferRuntime.h PATHS "${root}" PATH_SUFFIXES include include/x86_64-linux-gnu include/aarch64-linux-gnu
                NO_DEFAULT_PATH NO_CACHE)
      if(NOT found)
        set(TensorRTHeaders_PROBLEM "TENSORRT_ROOT is ${root}, which has no include/NvInferRuntime.h" PARENT_SCOPE)
        return()
      endif()
      set(${result} "${found}" PARENT_SCOPE)
      return()
    endif()
  endforeach()
  find_path(found NvInferRuntime.h PATHS ${CUDAToolkit_INCLUDE_DIRS} NO_CACHE)
  if(NOT found)
    _tensorrt_python(found)
  endif()
  set(${result} "${found}" PARENT_SCOPE)
endfunction()

# find_spec looks a package up without running any of its code.
function(_tensorrt_python result)
  set(${result} "" PARENT_SCOPE)
  if(DEFINED Python_EXECUTABLE)
    set(python "${Python_EXECUTABLE}")
  else()
    find_package(Python3 QUIET COMPONENTS Interpreter)
    set(python "${Python3_EXECUTABLE}")
  endif()
  if(NOT python)
    return()
  endif()
  execute_process(
    COMMAND "${python}" -c "import importlib.util as u; s = u.find_spec('kernel_lens'); print(*s.submodule_search_locations)"
    OUTPUT_VARIABLE package OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
  if(package AND EXISTS "${package}/include/tensorrt/NvInferRuntime.h")
    set(${result} "${package}/include/tensorrt" PARENT_SCOPE)
  endif()
endfunction()

_tensorrt_find(_tensorrt_include)
if(_tensorrt_include)
  get_filename_component(_tensorrt_include "${_tensorrt_include}" ABSOLUTE)
  # TensorRT's own spelling of its version changed within 10.
  set(_tensorrt_version "")
  if(EXISTS "${_tensorrt_include}/NvInferVersion.h")
    foreach(part IN ITEMS MAJOR MINOR)
      file(STRINGS "${_tensorrt_include}/NvInferVersion.h" _tensorrt_line
           REGEX "^#define (NV_TENSORRT_${part}|TRT_${part}_ENTERPRISE) +[0-9]+")
      string(REGEX MATCH "[0-9]+" _tensorrt_number "${_tensorrt_line}")
      list(APPEND _tensorrt_version "${_tensorrt_number}")
    endforeach()
    string(REPLACE ";" "." _tensorrt_version "${_tensorrt_version}")
  endif()
  if(NOT _tensorrt_version)
    set(TensorRTHeaders_PROBLEM "${_tensorrt_include} has no NvInferVersion.h that names its version")
  elseif(_tensorrt_version VERSION_LESS 10)
    set(TensorRTHeaders_PROBLEM
        "TensorRT ${_tensorrt_version} in ${_tensorrt_include} is too old: the plugin needs 10 or newer")
  else()
    set(TensorRTHeaders_FOUND TRUE)
    set(TensorRTHeaders_VERSION "${_tensorrt_version}")
    add_library(TensorRT::Headers INTERFACE IMPORTED GLOBAL)
    set_target_properties(TensorRT::Headers PROPERTIES INTERFACE_INCLUDE_DIRECTORIES "${_tensorrt_include}"
                                                       INTERFACE_SYSTEM_INCLUDE_DIRECTORIES "${_tensorrt_include}")
    message(STATUS "TensorRT ${_tensorrt_version} headers: ${_tensorrt_include}")
  endif()
elseif(NOT TensorRTHeaders_PROBLEM)
  set(TensorRTHeaders_PROBLEM
      "TensorRT's headers are not found: set TENSORRT_INCLUDE_DIR or TENSORRT_ROOT, or pip install --no-deps kernel-lens and name \
its Python: -DPython_EXECUTABLE=.venv/bin/python")
endif()
