// Offers the simulated driver to a real loader of Level Zero, which asks a driver for tables of its
// functions. Built with Intel's own headers.
#include <level_zero/ze_api.h>
#include <level_zero/ze_ddi.h>

#define TABLE(name, type, ...)                                                                \
    ZE_APIEXPORT ze_result_t ZE_APICALL zeGet##name##ProcAddrTable(ze_api_version_t version,  \
                                                                   type *table) {             \
        (void)version;                                                                        \
        const type filled = {__VA_ARGS__};                                                    \
        *table = filled;                                                                      \
        return ZE_RESULT_SUCCESS;                                                             \
    }

TABLE(Global, ze_global_dditable_t, .pfnInit = zeInit)
TABLE(Driver, ze_driver_dditable_t, .pfnGet = zeDriverGet, .pfnGetApiVersion = zeDriverGetApiVersion,
      .pfnGetProperties = zeDriverGetProperties)
TABLE(Device, ze_device_dditable_t, .pfnGet = zeDeviceGet, .pfnGetProperties = zeDeviceGetProperties,
      .pfnGetComputeProperties = zeDeviceGetComputeProperties,
      .pfnGetModuleProperties = zeDeviceGetModuleProperties,
      .pfnGetCommandQueueGroupProperties = zeDeviceGetCommandQueueGroupProperties,
      .pfnGetMemoryProperties = zeDeviceGetMemoryProperties)
TABLE(Context, ze_context_dditable_t, .pfnCreate = zeContextCreate, .pfnDestroy = zeContextDestroy)
TABLE(CommandQueue, ze_command_queue_dditable_t, .pfnCreate = zeCommandQueueCreate,
      .pfnDestroy = zeCommandQueueDestroy,
      .pfnExecuteCommandLists = zeCommandQueueExecuteCommandLists,
      .pfnSynchronize = zeCommandQueueSynchronize)
TABLE(CommandList, ze_command_list_dditable_t, .pfnCreate = zeCommandListCreate,
      .pfnCreateImmediate = zeCommandListCreateImmediate, .pfnDestroy = zeCommandListDestroy,
      .pfnClose = zeCommandListClose, .pfnReset = zeCommandListReset,
      .pfnAppendBarrier = zeCommandListAppendBarrier,
      .pfnAppendMemoryCopy = zeCommandListAppendMemoryCopy,
      .pfnAppendMemoryFill = zeCommandListAppendMemoryFill,
      .pfnAppendWaitOnEvents = zeCommandListAppendWaitOnEvents,
      .pfnAppendLaunchKernel = zeCommandListAppendLaunchKernel)
TABLE(EventPool, ze_event_pool_dditable_t, .pfnCreate = zeEventPoolCreate,
      .pfnDestroy = zeEventPoolDestroy)
TABLE(Event, ze_event_dditable_t, .pfnCreate = zeEventCreate, .pfnDestroy = zeEventDestroy,
      .pfnHostSynchronize = zeEventHostSynchronize, .pfnQueryStatus = zeEventQueryStatus,
      .pfnHostReset = zeEventHostReset)
TABLE(Mem, ze_mem_dditable_t, .pfnAllocDevice = zeMemAllocDevice, .pfnAllocHost = zeMemAllocHost,
      .pfnFree = zeMemFree)
TABLE(Module, ze_module_dditable_t, .pfnCreate = zeModuleCreate, .pfnDestroy = zeModuleDestroy)
TABLE(ModuleBuildLog, ze_module_build_log_dditable_t, .pfnDestroy = zeModuleBuildLogDestroy,
      .pfnGetString = zeModuleBuildLogGetString)
TABLE(Kernel, ze_kernel_dditable_t, .pfnCreate = zeKernelCreate, .pfnDestroy = zeKernelDestroy,
      .pfnSetGroupSize = zeKernelSetGroupSize, .pfnSetArgumentValue = zeKernelSetArgumentValue,
      .pfnSetIndirectAccess = zeKernelSetIndirectAccess)
TABLE(Fence, ze_fence_dditable_t, 0)
TABLE(Image, ze_image_dditable_t, 0)
TABLE(Sampler, ze_sampler_dditable_t, 0)
TABLE(PhysicalMem, ze_physical_mem_dditable_t, 0)
TABLE(VirtualMem, ze_virtual_mem_dditable_t, 0)

// What the loader asks for although nothing here uses it.
#define EMPTY(name)                                                                           \
    ZE_APIEXPORT ze_result_t ZE_APICALL name##ProcAddrTable(ze_api_version_t version,         \
                                                            void *table) {                    \
        (void)version;                                                                        \
        (void)table;                                                                          \
        return ZE_RESULT_SUCCESS;                                                             \
    }

EMPTY(zesGetDevice)
EMPTY(zesGetDiagnostics)
EMPTY(zesGetDriver)
EMPTY(zesGetEngine)
EMPTY(zesGetFabricPort)
EMPTY(zesGetFan)
EMPTY(zesGetFirmware)
EMPTY(zesGetFrequency)
EMPTY(zesGetLed)
EMPTY(zesGetMemory)
EMPTY(zesGetPerformanceFactor)
EMPTY(zesGetPower)
EMPTY(zesGetPsu)
EMPTY(zesGetRas)
EMPTY(zesGetScheduler)
EMPTY(zesGetStandby)
EMPTY(zesGetTemperature)
EMPTY(zetGetCommandList)
EMPTY(zetGetContext)
EMPTY(zetGetDebug)
EMPTY(zetGetDevice)
EMPTY(zetGetKernel)
EMPTY(zetGetMetricGroupExp)
EMPTY(zetGetMetricGroup)
EMPTY(zetGetMetric)
EMPTY(zetGetMetricQueryPool)
EMPTY(zetGetMetricQuery)
EMPTY(zetGetMetricStreamer)
EMPTY(zetGetModule)
EMPTY(zetGetTracerExp)
